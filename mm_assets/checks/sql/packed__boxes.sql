-- Every box of a document has left before right and top above bottom, and lies within its page.
select *
from packed_boxes
where "left" < 0 or top < 0 or "right" > width or bottom > height or "left" > "right" or top > bottom
order by sample_id, modality, kind, item
